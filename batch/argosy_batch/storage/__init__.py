"""Storage: what is kept for clients beyond a request, on a directory or bucket that several processes may share.

Owns: objects of owners, with quotas and a time to live. Must not know: what an object means (files, batches, stored
responses), HTTP, keys.
Invariant: an object is found by its id and its owner only; writes are atomic, and survive a crash once they return;
two processes on one storage see each other's objects.

    object_store     JSON documents and their contents by kind, owner and id; quotas; the sweep of expired ones
    owner_usage      how much each owner keeps
    shared_calls     calls that many wait for at once, such as listings
    blob_store       the interface of a storage: bytes under a key, compare-and-swap
    directory_store  a directory, perhaps on a volume that several machines mount
    storage_threads  runs the calls of a file system, which may hang
    bucket_store     a bucket: s3:// and gs://
    quarantine       what cannot be read, put aside
    open_blobs       chooses one of the two by its location
"""
