"""The admin port: overview, history, explanations of decisions, and the page that shows them."""
