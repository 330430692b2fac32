//go:build unix

// Command torture breaks everything around consumers that use the inbox, while payments come in, and then
// counts: every payment booked once, every event published, under one UUID, and invoiced once, and nothing
// left unsent. It does the same to inboxes that are wrong on purpose, which it must convict.
//
// It starts servers of its own and touches no others. The seed decides which faults come in which order and
// what is sent how often; the timing is the machine's.
//
//	make torture TORTURE_FLAGS="-time 2m -seed 7"
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	if config, isWorker := os.LookupEnv(workerVariable); isWorker {
		if err := work(config); err != nil {
			fmt.Fprintln(os.Stderr, "stopped:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := drive(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	}
}

// part is one run of many.
type part struct {
	inbox, database string
	share           float64 // of the time
}

func (p part) String() string { return p.inbox + "/" + p.database }

// parts in their order: ours, and then the negative control.
func allParts() []part {
	parts := []part{{ours, postgresqlName, 1}, {ours, sqliteName, 0.2}}
	for _, wrong := range wrongInboxes {
		parts = append(parts, part{wrong, postgresqlName, 0.1})
	}
	return parts
}

func drive(ctx context.Context, arguments []string, out, progress io.Writer) error {
	flags := flag.NewFlagSet("torture", flag.ContinueOnError)
	flags.SetOutput(progress)
	duration := flags.Duration("time", 10*time.Minute, "`time` of faults for watermill-inbox on PostgreSQL; a fifth of it for SQLite, a tenth for each wrong inbox")
	seed := flags.Uint64("seed", uint64(time.Now().UnixNano()), "`seed`; the same one draws the same faults")
	only := flags.String("only", "", "`part` of the name of what to run, as in watermill-inbox/postgresql")
	verbose := flags.Bool("v", false, "print the workers' errors")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 || *duration < minimum {
		return fmt.Errorf("there are only flags, and -time is at least %s", minimum)
	}
	parts := slices.DeleteFunc(allParts(), func(p part) bool { return !strings.Contains(p.String(), *only) })
	if len(parts) == 0 {
		return fmt.Errorf("nothing is called %q", *only)
	}
	fmt.Fprintf(out, "seed %d\n", *seed)
	var unexpected []string
	for _, p := range parts {
		fmt.Fprintf(progress, "== %s\n", p)
		report, err := torture(ctx, p.inbox, p.database, max(minimum, time.Duration(float64(*duration)*p.share)), *seed, *verbose, progress)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		report.print(out)
		if broken := len(report.violations) > 0; broken != (p.inbox != ours) {
			unexpected = append(unexpected, p.String())
		}
	}
	if len(unexpected) > 0 {
		return fmt.Errorf("not as it must be: %s; repeat it with -seed %d", strings.Join(unexpected, ", "), *seed)
	}
	fmt.Fprintln(out, "\nAs it must be: watermill-inbox keeps its promise, a wrong inbox is convicted.")
	return nil
}

// minimum is the shortest time in which something can go wrong.
const minimum = 10 * time.Second
