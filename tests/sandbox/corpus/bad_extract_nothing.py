# rung: extract
