"""Views of the cluster: the values on which decisions are made."""
