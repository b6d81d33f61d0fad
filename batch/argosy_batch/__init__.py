"""The Batch API: /v1/files, /v1/batches, and the runner that sends the requests of batches through this router.

Owns: files and batches of the keys that made them, in the storage that all routers share.
Must not know: how a request is routed, and where the storage keeps its blobs.
Invariants: a key finds its own files and batches only, through any router; a batch is run by one router at a time; an
output has one line for each request, whichever routers ran it.

    batch_routes     the routes of both, from a request's head to its answer
    files_api        /v1/files
    batches_api      /v1/batches
    listing          pages of lists, as OpenAI's
    file_upload      a form's file on its way to the storage
    multipart        parser of forms
    content_stream   a file on its way to the client
    file_objects     what is stored and shown of a file
    batch_objects    what is stored and shown of a batch

    batch_runner     claims batches, and runs them to their end
    batch_lease      which router runs a batch
    batch_run        one batch: validation, its requests, its results
    input_lines      the requests in an input file
    line_request     one request: through the router's own queue, again after 429 and 503
    answer_memory    bound on the memory of answers, over all batches
    line_waits       which requests of a batch wait, so that it may yield its place
    batch_results    lines of results: kept as they come, merged into files at the end
    output_lines     lines of the files of results
    batch_pace       how many requests of batches may be in flight
    batch_records    documents of batches, and their updates
    batch_service    assembly of all of these
"""

# Not compiled: waits for the storage.
