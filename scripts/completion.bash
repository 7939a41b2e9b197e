# bash completion for kernel-agent: `source` it, or install it as bash-completion/completions/kernel-agent.

_kernel_agent()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} choices=
    local commands="batch bench cancel check differentiate doctor inspect logs prompt retry run serve status store submit verify"
    local options="--file-path --out --sweep --path --resume --store --topk --min-sim --rag-exclude --no-retrieval --no-lessons --backend
        --base-url --model --reasoning-effort --api-key-file --context-tokens --llm-timeout --draft --no-wait
        --prompts --max-iters --candidates --patience-parity --patience-perf --min-rel-impr --max-tokens
        --max-seconds --max-cost --price-in --price-out --no-optimise --device --target --dtype --python
        --require-sandbox --deadline --gpus --children --no-compile-cache --compile-cache-mb --json --quiet --log-level --log-format --config
        --jobs --force --state
        --address --token-file --rate --keep-days --keep-runs --watch --priority --wait --follow --changed-since --part --junit --function --fail-fast --sanitize --print --only --seconds --help --version"
    COMPREPLY=()
    case $prev in
        --sweep) choices="all required" ;;
        --backend) choices="openai mailbox: none" ;;
        --reasoning-effort) choices="minimal low medium high xhigh" ;;
        --draft) choices="auto llm differentiator" ;;
        --device) choices="auto cpu cuda" ;;
        --target) choices="sm_80 sm_86 sm_89 sm_90 sm_100" ;;
        --dtype) choices="float32 float16 bfloat16 float64" ;;
        --require-sandbox) choices="full landlock+seccomp none" ;;
        --only) choices="bwd fwd both" ;;
        --log-level) choices="error warn info debug" ;;
        --log-format) choices="auto text journal json" ;;
        store) choices="build add import list show search verify export lessons" ;;
        --out | --path | --prompts | --resume | --state | --watch | batch | verify)
            mapfile -t COMPREPLY < <(compgen -d -- "$cur")
            return ;;
        --file-path | --store | --api-key-file | --python | --config | --junit | --token-file | inspect | check | bench | differentiate | prompt | submit)
            mapfile -t COMPREPLY < <(compgen -f -- "$cur")
            return ;;
        --function | --topk | --min-sim | --rag-exclude | --base-url | --model | --context-tokens | \
        --llm-timeout | --max-* | --candidates | --patience-* | --min-rel-impr | --price-* | --deadline | --gpus | --children | --compile-cache-mb | --jobs | --priority | --seconds | \
        --rate | --keep-* | --changed-since | --part | logs | status | cancel | retry)
            return ;;
    esac
    if [[ -n $choices ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$cur")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
    elif ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -o filenames -F _kernel_agent kernel-agent
