"""Exit codes of ``kvstore``, and what ``--help`` says of them."""

EXIT_FAILED, EXIT_USAGE, EXIT_UNCLEAN = 1, 2, 3
EXIT_CODES = """\
exit codes:
  0  done; serve: stopped by SIGTERM or SIGINT with everything written back
  1  failed; the line on stderr says why
  2  a flag, a setting or a URL is wrong
  3  serve: stopped, but not everything was written back in time
"""
