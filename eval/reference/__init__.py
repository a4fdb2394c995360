"""Small reference models, trained from scratch on a generated language in which answers depend on the context."""
