"""The process of the engine core, and how a client starts, reaches and ends it.

core_process          the process: threads for input and output, and the busy loop
output_router         which of several API processes gets which message
held_outputs          which messages wait for later ones, to be sent together
call_parameters       what the sequences of a call hold in common
core_handle           starts, watches and ends the process on behalf of a client
attached_core         the process as an API process sees it that has not started it
client_group          what the clients of several API processes share
core_client           blocking clients: in the caller's process, and over ZMQ
copied_core_client    blocking client of a core that has copies in other processes, started by a launcher
async_core_client     asyncio client, for the API server
output_socket         how it reads the core's messages
data_parallel_client  both kinds for several cores, one for each data-parallel rank
rank_balancer         which rank gets a request
rank_prefixes         which ranks hold a prefix
"""
