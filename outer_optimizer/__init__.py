"""The outer step as pure maths on NumPy fp32 arrays: pseudo-gradients, codecs, the weighted mean, the
outer optimizers and digests of what comes out. No I/O, no torch, no clock; and whatever islands must agree
on has the same bits on every CPU. See README.md.
"""
