"""Executors: how the core reaches its workers, with one interface and one implementation per way of running them.

abstract            the interface, as in vLLM
factory             chooses the implementation
uniproc_executor    one worker in the core's process
remote_executor     what executors of workers in other processes share
multiproc_executor  a process per worker
local_workers       these processes
multinode_executor  the same over several machines, each started by hand or by a StatefulSet
node_group          the other machines, as the first one sees them
node_agent          one of them
node_channel        authenticated messages between machines
handshake_slots     connections whose peers have not proved yet that they are such machines
refusal_log         warnings about those that are refused
node_messages       kinds of messages between machines
node_greeting       what has to be the same on all machines
node_key            the key of an engine's machines
rendezvous          how workers find each other for torch.distributed
same_model          checks that all workers have loaded one model
external_launcher_executor
                    one worker in this process, beside copies of the program that a launcher has started
ray_executor        an actor of Ray per worker, on the nodes of a cluster
ray_cluster         the connection to Ray
private_ray         a Ray of the engine's own
ray_placement       which worker gets which rank
ray_worker          the actor
worker_process      the process of a worker
answer_queue        sends a worker's answers, in a thread
worker_death        why workers have ended
worker_messages     kinds of messages to and from it
broadcast           queue in shared memory from the core to all workers
worker_class        loads the class of `--worker-cls`
"""
