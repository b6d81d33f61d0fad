"""`argosy batch`: files, batches and stored responses, on a storage that several of these processes may share.

Owns: what clients leave beyond a request, and the requests of batches until each has its answer.
Must not know: how a request is routed. It is an ordinary client of the routers, on behalf of the accounts.
Invariants: an account finds its own files, batches and responses only, through any router; a batch is run by one
process at a time; an output has one line for each request, whichever processes ran it; what cannot be read is put aside
and stops nothing.
"""
