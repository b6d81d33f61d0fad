"""Argosy's model fetcher: brings a model from a hub, bucket, registry or web server into a local store, complete or not
at all. Stands on the protocol package only; imports no torch."""
