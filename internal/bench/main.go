// Command bench compares the inbox with a plain transaction and with what people write by hand, on real
// servers, interleaved in one run. It prints ratios with their spread and draws a chart. It never fails
// because of a figure; it fails when a variant has not done what it was measured for.
//
// The servers are those of WATERMILL_TEST_POSTGRES_URL and WATERMILL_TEST_AMQP_URI; make bench starts them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, out, progress io.Writer) (err error) {
	options, err := parseOptions(arguments, progress)
	if err != nil {
		return err
	}
	b, err := newBench(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	environment, err := b.environment(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, environment)
	if err := profiled(options.profile, func() error { return b.run(ctx, progress) }); err != nil {
		return err
	}
	if err := b.print(out); err != nil {
		return err
	}
	if options.svg == "" {
		return nil
	}
	bars := b.chartBars()
	if bars == nil {
		fmt.Fprintln(progress, "bench: no chart, because not all of it was measured")
		return nil
	}
	return drawChart(options.svg, bars)
}

// profiled runs a function, with a CPU profile if there is a file for it.
func profiled(file string, do func() error) error {
	if file == "" {
		return do()
	}
	profile, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(profile); err != nil {
		return errors.Join(err, profile.Close())
	}
	err = do()
	pprof.StopCPUProfile()
	return errors.Join(err, profile.Close())
}
