"""Training frameworks whose loops are their own: each module makes one of them save and resume by `gpucloud.resume`.

A framework is imported by its module alone, so that nobody needs one who does not use it.
"""
