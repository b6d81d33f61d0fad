"""`argosy batch`: files, batches and stored responses, on a storage that several of these processes may share.

Owns: what clients leave beyond a request, and the requests of batches until each has its answer.
Must not know: how a request is routed. It is an ordinary client of the routers, on behalf of the accounts.
Invariants: an account finds its own files, batches and responses only, through any router; a batch is run by one
process at a time; an output has one line for each request, whichever processes ran it; what cannot be read is put aside
and stops nothing.

    main             flags and environment
    config           every flag
    program          the process: its parts, their tasks and their end
    app              the HTTP application, for routers and probes
    metrics          what it counts

    files_api        /v1/files
    batches_api      /v1/batches
    listing          pages of lists, as OpenAI's
    file_upload      a form's file on its way to the storage
    multipart        parser of forms

    batch_runner     claims batches, and runs them to their end
    batch_lease      which process runs a batch
    batch_run        one batch: validation, its requests, its results
    batch_records    documents of batches, and their updates
    input_lines      the requests in an input file
    line_request     one request: again after 429 and 503
    line_pace        how many requests may be in flight, and whose is the next
    line_waits       which requests of a batch wait, so that it may yield its place
    router_client    the way to a router
    answer_memory    bound on the memory of answers, over all batches
    batch_results    lines of results: kept as they come, merged into files at the end
    output_lines     lines of the files of results

    stored_responses  responses, by owner and id
    run_heartbeats    whether the router that generates one still lives

    storage          where all of this is kept
"""
