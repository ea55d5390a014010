"""Host families: one folder per library, named like the library; in it one file per family.

A folder is imported when a model of that library is reduced or listed, so nobody pays for a library that is not used.
"""
