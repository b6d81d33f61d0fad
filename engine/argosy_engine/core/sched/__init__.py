"""Scheduling: which requests compute how many tokens in a step.

Must not know: tensors, text, clients.

    scheduler        plans a step, and processes its output
    call_queue       waiting queue with fair shares of the running slots between calls
    tenant_queue     waiting queue with fair turns between tenants
    request_queue    priority queue of waiting requests, and the turns of a batch's prompts
    step_plan        a step under construction
    steps_in_flight  steps whose output is not processed yet
    step_timing      measured duration of steps, for routers
"""
