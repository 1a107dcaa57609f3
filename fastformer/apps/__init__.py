"""What people run: translation, language models, classifiers and what they share. The library imports none of it."""
