"""The attacks, one module per family. Each module has `ATTACKS`; `attack.rotation` lists the modules."""
