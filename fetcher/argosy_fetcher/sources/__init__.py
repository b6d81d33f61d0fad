"""Sources of models, one module each. `registry` names them; `source` is what a new one implements.

source                the interface
registry              the sources by the scheme of a URI
documents             small files of a source, bounded and decoded
credential_values     checks of credentials before a client gets them
tls                   which authorities are trusted
unknown_host          tells a wrong name from a failure of the network

hub                   `hf://`
hub_endpoint          the hub's address
hub_environment       its environment variables
hub_listing           its list of a model's files
hub_errors            what its refusals mean

object_store          `s3://` and `gs://`
bucket_clients        clients by obstore
bucket_endpoint       addresses of other stores
bucket_errors         what refusals mean
s3_credentials        credentials for S3
instance_metadata     roles of an EC2 instance
google_credentials    credentials for Google

oci                   `oci://`
oci_reference         references to images and artifacts
oci_client            manifests and blobs of a repository
oci_manifest          types of manifests
oci_layers            which files the layers are
oci_http              HTTP to registries
oci_auth              authentication to a registry
oci_credentials       credentials from docker's and podman's files

web                   `https://`
web_client            GET requests with redirects
sha256sums            a folder's list of digests
"""
