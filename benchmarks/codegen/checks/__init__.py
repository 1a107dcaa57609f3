"""What is read from each stage of a compilation beyond its resources: TTGIR, PTX and SASS, a module for each question.

Every one of these goes into the fingerprint of a compilation (`compilation.fingerprint`).
"""
