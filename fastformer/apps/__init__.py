"""What people run: translation, language models and classifiers, and what they share. The library imports none of it."""
