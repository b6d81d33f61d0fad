"""Argosy's model fetcher: brings a model from a hub, bucket, registry or web server into a local store, complete or not
at all. Stands on the protocol package only; imports no torch.

pull               a URI's model, from the store or its source
source_uri         the grammar of such URIs
model_fetch        from a source into the store
config_fetch       the same without weights
header_fetch       the same with the headers of the weights only
hub_cache          models in Hugging Face's own cache
sources            the sources, a module each
credentials        values for sources, from the environment and files
snapshot           what a source holds at one revision
selection          which files are fetched

transfer           files into a directory, several parts at once
range_reader       ranges of a file, across cuts
retry              when to try again, and when to give up
minimum_rate       which source is too slow
partial_file       a file while its parts arrive
part_journal       which parts have arrived
sibling_revisions  files that the store has of another revision
archive_members    reads archives from hostile places
unpacking          takes files out of archives
digests            hash functions by name
task_queue         runs tasks in a few threads
loopback           addresses that need no encryption

store              models on the disk
store_layout       names of its directories and files
store_index        which models it has
store_usage        what they take
store_pruning      removes models
store_tree         prunes stores of many tenants as one
room               removes models to make room for another
model_hold         keeps a model while a program reads it
file_lock          locks between processes
lock_holder        who holds a lock, and whether it makes progress
marked_progress    tells those who wait that the holder makes progress
disk               space, errors and durability

progress           what a fetch reports
progress_display   as a bar or lines
progress_meter     as numbers
progress_server    over HTTP, for a cluster's operator
errors             what is raised
"""
