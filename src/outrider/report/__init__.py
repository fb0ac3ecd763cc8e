"""The report room: what a run left in its folder, drawn. A run folder in, one self-contained HTML page out."""
