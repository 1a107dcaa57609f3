"""Host code of all launchers: the launch, properties of the device, and plans that repeat earlier calls."""
