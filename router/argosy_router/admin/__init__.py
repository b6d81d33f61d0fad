"""The admin port: overview, history, explanations of routing decisions, and the page that shows them."""
