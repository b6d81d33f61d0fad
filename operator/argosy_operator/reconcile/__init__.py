"""The control loop: observe, decide, act, report."""
