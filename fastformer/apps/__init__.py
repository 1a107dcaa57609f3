"""Applications: translation, language models, classifiers and shared modules. The library imports none of them."""
