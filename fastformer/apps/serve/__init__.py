"""A local page and a JSON API to try a trained model: `fastformer serve`."""
