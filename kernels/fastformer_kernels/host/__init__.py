"""What every launcher needs on the host: the launch, the facts of the device, and plans of calls seen before."""
