"""What the host does around a call: devices and transfers, calls of autograd Functions, steps launched whole."""
