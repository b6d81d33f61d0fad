"""The process around the control loop: event source, health port, keys of the installation, leader election."""
