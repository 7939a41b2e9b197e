#compdef kernel-agent
# zsh completion for kernel-agent: install it as _kernel-agent in a folder of $fpath.

local -a commands store_commands options
commands=(
    'batch:every forward file below a folder'
    'bench:times of a finished pair on a GPU'
    'check:the full verdict on a pair that exists already'
    'differentiate:a backward from the built-in differentiator alone'
    'doctor:what this machine gives'
    'inspect:what is understood of a forward file'
    'prompt:what a run would ask the model first, and its tokens'
    'run:one forward file to a verified pair'
    'submit:a file to the service'
    'status:runs of the service'
    'cancel:a run of the service'
    'serve:a queue of runs behind an HTTP API'
    'store:the store of pairs'
    'verify:repeat the verdict of a run, without a model'
)
store_commands=(build add import list show search verify export lessons)
options=(
    '--file-path[forward file to complete]:file:_files -g "*.py"'
    '--out[folder for run folders and finished pairs]:folder:_files -/'
    '--sweep[shapes to check]:which:(all required)'
    '--path[folders whose modules a forward file may import]:folders:_files -/'
    '--resume[go on with a run folder]:run:_files -/'
    '--store[pair store]:database:_files'
    '--topk[similar pairs to retrieve]:number:'
    '--min-sim[least similarity of a retrieved pair]:similarity:'
    '--rag-exclude[leave out pairs whose path contains these texts]:texts:'
    '--no-retrieval[show the model no similar pairs]'
    '--no-lessons[neither show nor keep what runs learn]'
    '--backend[who answers]:backend:(openai mailbox\: none)'
    '--base-url[OpenAI-compatible endpoint]:url:_urls'
    '--model[model to ask]:model:'
    '--reasoning-effort[passed on to the model]:level:(minimal low medium high xhigh)'
    '--api-key-file[file that holds the key]:file:_files'
    '--context-tokens[prompt budget]:tokens:'
    '--llm-timeout[longest time for one answer]:seconds:'
    '--draft[who writes the first candidate]:who:(auto llm differentiator)'
    '--no-wait[mailbox: exit 75 instead of waiting]'
    '--prompts[prompt templates]:folder:_files -/'
    '--max-iters[questions to the model in one run]:number:'
    '--candidates[questions a turn, asked at once]:number:'
    '--patience-parity[attempts below the best before rolling back]:number:'
    '--patience-perf[optimise turns without gain before stopping]:number:'
    '--min-rel-impr[relative gain that an optimisation must bring]:gain:'
    '--max-tokens[token budget]:tokens:'
    '--max-seconds[time budget]:seconds:'
    '--max-cost[money budget]:cost:'
    '--price-in[price of a million prompt tokens]:price:'
    '--price-out[price of a million answer tokens]:price:'
    '--no-optimise[stop at the first verified candidate]'
    '--device[where kernels run]:device:(auto cpu cuda)'
    '--target[GPU to compile for when there is none]:target:(sm_80 sm_86 sm_89 sm_90 sm_100)'
    '--dtype[dtype for make_args]:dtype:(float32 float16 bfloat16 float64)'
    '--python[interpreter of the sandbox]:python:_files'
    '--require-sandbox[refuse to run with less]:layers:(full landlock+seccomp none)'
    '--no-compile-cache[compile every kernel anew]'
    '--compile-cache-mb[size of the cache of compiled kernels]:megabytes:'
    '--deadline[longest time for one child]:seconds:'
    '--children[most children at a time (0: by the machine)]:number:'
    '--json[one result object on stdout]'
    '--quiet[errors only]'
    '--log-level[what to show]:level:(error warn info debug)'
    '--config[configuration file]:file:_files'
    '--jobs[batch, serve: runs at a time]:number:'
    '--force[batch: also what is verified and unchanged]'
    '--state[serve: folder of the queue]:folder:_files -/'
    '--address[serve: where it listens]:address:'
    '--token-file[serve: file with the token]:file:_files'
    '--rate[serve: requests a second of each client]:number:'
    '--priority[submit: larger ones go first]:number:'
    '--wait[submit: until the run has ended]'
    '--junit[check: write JUnit XML]:file:_files'
    '--function[check, inspect: which function of a module]:name:'
    '--fail-fast[check: stop at the first case that fails]'
    '--sanitize[check: run compute-sanitizer too (GPU)]'
    '--print[differentiate: print the backward]'
    '--only[bench: the pass to time]:pass:(bwd fwd both)'
    '--seconds[bench: seconds of timing]:seconds:'
    '--help[how to use the program]'
    '--version[its version]'
)

_kernel_agent_word() {
    if (( CURRENT == 2 )); then
        _describe command commands
    elif [[ $words[2] == store && CURRENT -eq 3 ]]; then
        compadd -a store_commands
    else
        _files
    fi
}

_arguments -s $options '*:word:_kernel_agent_word'
