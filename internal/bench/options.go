package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"
)

type options struct {
	rounds  int
	slice   time.Duration
	only    *regexp.Regexp
	workers []int // how many messages are in flight, each on a connection of its own
	rows    int
	svg     string
	profile string
}

// quick is a run that shows only that everything works.
var quick = map[string]string{"rounds": "1", "slice": "10ms", "workers": "1,4", "rows": "2000", "svg": ""}

func parseOptions(arguments []string, usage io.Writer) (options, error) {
	o := options{only: regexp.MustCompile(""), workers: []int{1, 4, 16}}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.IntVar(&o.rounds, "rounds", 7, "`number` of rounds; each measures every variant, in random order")
	flags.DurationVar(&o.slice, "slice", 150*time.Millisecond, "how long a variant is measured at a time")
	flags.IntVar(&o.rows, "rows", 1_000_000, "`rows` in the filled table; ten million take minutes to fill in")
	flags.StringVar(&o.svg, "svg", "chart.svg", "`file` for the chart; empty: none")
	flags.StringVar(&o.profile, "cpuprofile", "", "`file` for a CPU profile of the run")
	flags.Func("only", "`pattern` of what to measure, for example first/network/4 or rabbitmq; baselines come along", func(pattern string) (err error) {
		o.only, err = regexp.Compile(pattern)
		return err
	})
	flags.Func("workers", "`list` of how many messages are in flight (default 1,4,16)", func(list string) (err error) {
		o.workers, err = parseWorkers(list)
		return err
	})
	isQuick := flags.Bool("quick", false, "one tiny round of everything and no chart, unless other flags say more")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, errors.New("there are only flags, no arguments")
	}
	if *isQuick {
		given := map[string]bool{}
		flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
		for name, value := range quick {
			if given[name] {
				continue
			}
			if err := flags.Set(name, value); err != nil {
				return o, err
			}
		}
	}
	if o.rounds < 1 || o.slice <= 0 || o.rows < 1 {
		return o, errors.New("-rounds, -slice and -rows must be positive")
	}
	return o, nil
}

func parseWorkers(list string) ([]int, error) {
	var workers []int
	for _, text := range strings.Split(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is not a number of workers", text)
		}
		workers = append(workers, n)
	}
	return workers, nil
}
