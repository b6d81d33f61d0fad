"""The page of model types: which code runs each, and what its layers attend to or keep."""
