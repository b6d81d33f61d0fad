"""The attacks, one module per family. Each module defines `ATTACKS`; `attack.rotation` lists the modules."""
