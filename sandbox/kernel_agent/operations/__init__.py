"""Operations of the child protocol (docs/protocol.md): each has `run(request, scratch)`, which gives the
result.

In: a request, the files that it names. Out: an entry of result.json, and files of tensors beside it.

    inspect             what a forward file declares
    oracle              expected outputs and gradients, from the forward alone
    evaluations         how it evaluates what a call recorded
    finite_differences  a second opinion on them
    candidate           what a backward really gives
    scan                what its source contains
    sanitize            the candidate below compute-sanitizer
    facts               what its kernels cost
    traffic             counts bytes and atomics while they are interpreted
    budget              what a case will take

Operation compile is kernel_agent.compiled, operation differentiate is kernel_agent.differentiate.operation.
"""
