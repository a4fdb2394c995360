"""Reference models: small, trained here from scratch, on a language in which the context matters."""
