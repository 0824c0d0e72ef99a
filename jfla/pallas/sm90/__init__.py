"""implementation="pallas" on Hopper (compute capability 9.0): one module or package per stage."""
