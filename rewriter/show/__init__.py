"""Pages, drawings and tables of what the rooms below find: HTML files by Jinja2 templates, and rich's tables."""
