"""Figures, one file per family: functions ``draw_NAME(tables)`` behind `@draws`, which find themselves."""
