"""What surrounds the control loop in a process: event source, health port, keys of the installation."""
