"""Access to the cluster: the API client, the cache of objects, and the reports of routers."""
