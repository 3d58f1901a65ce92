"""The outer step as pure maths on NumPy fp32 arrays: the same bits on every machine. See README.md."""
