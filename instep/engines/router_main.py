"""`python -m instep.engines.router_main ...`: vllm-router's command line, in a process that ends with its parent."""

from instep.processes import follow_parent

if __name__ == "__main__":
    follow_parent()
    from vllm_router.launch_router import main

    main()
