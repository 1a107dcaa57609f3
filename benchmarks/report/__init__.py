"""What is made of a run: the committed result, tables, charts, the README's section."""
