"""The local fleet: a supervisor that takes the operator's place, and runs what manifests declare as processes.

manifests         reads manifests
cluster_fields    which of their fields have no effect here
fleet_models      fetches and checks the models first
gpus              this machine's GPUs, and which replica gets them

control_client    what a command asks of the supervisor, which it starts if need be
control_messages  the messages between them
control_server    the supervisor's process
state_dir         its directory
settings          its programs, addresses and times

supervisor        makes the processes equal to the manifests
rollout           the next step of a change
replica           an engine
router_process    the router
batch_process     what keeps files, batches and responses for it
child_process     a process and its log
end_with_parent   ends a process with the one that started it
http_get          asks a process for its state
first_event       waits for the first of several events
"""
