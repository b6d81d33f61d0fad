"""The router as the endpoint picker of a gateway (Gateway API Inference Extension).

Envoy forwards the requests and asks the router, by its external processing protocol (ext_proc), where each one goes.

Owns: the gRPC port, and what follows from a gateway's messages for a request's life in the router.
Must not know: how a replica is chosen, how requests are queued, limited and accounted for: that is the proxy's.
Invariant: a request has one pick, and its charge is released exactly once, however the gateway's stream ends. gRPC is
imported only by a router with --ext-proc-port.

    ext_proc_server    the gRPC port: its limits, its certificate, health
    ext_proc_stream    one stream of the gateway: the order of its messages, and the router's replies
    ext_proc_schema    the protocol's messages as protobuf knows them
    ext_proc_messages  the protocol's messages: what is read of them, and how replies are made
    request_intake     a request on its way in: its head, its bounded body, the routes that the router answers itself
    endpoint_pick      one request from its admission to the end of its response
"""

# Not compiled: waits for gateways; protobuf's messages and gRPC take most of the time.
