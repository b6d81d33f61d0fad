"""Messages between client, engine core and workers, as msgspec structs: the contract that each side reads. No torch."""
