"""The admin port: overview, history, explanations of routing decisions, and the page that shows them."""

# Not compiled: no client's request passes the admin port.
