// Command outbox is a chain of two services in which nothing is lost and nothing happens twice, whatever
// is killed:
//
//	topic "orders" > orders service > outbox table > forwarder > topic "order_booked" > invoices service
//
// Each role is one readable file: orders.go, forwarder.go and invoices.go. Without -role it is the driver:
// it starts PostgreSQL, RabbitMQ and the roles as processes of their own, publishes orders, kills processes and
// the broker meanwhile, and ends with status 1 unless every order was booked once and invoiced once.
//
// Environment of a role: POSTGRES_URL, AMQP_URI, TOPIC_PREFIX, and DEBUG=1 for lines per message. The driver uses
// WATERMILL_TEST_POSTGRES_URL and WATERMILL_TEST_AMQP_URI when they are set; a broker that it was given is not killed.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
)

// settings are what a role is told.
type settings struct {
	postgresURL string
	amqpURI     string
	prefix      string // of the topics, on a broker that others use too
}

func (s settings) ordersTopic() string { return s.prefix + "orders" }
func (s settings) bookedTopic() string { return s.prefix + "order_booked" }

// options are the driver's.
type options struct {
	orders      int
	copies      int
	kills       int
	brokerKills int
	seed        uint64
	timeout     time.Duration
	verbose     bool
}

func main() {
	var o options
	role := flag.String("role", "driver", "orders, forwarder, invoices or driver; the other flags are the driver's")
	flag.IntVar(&o.orders, "orders", 200, "orders to publish")
	flag.IntVar(&o.copies, "copies", 3, "how often each order is published")
	flag.IntVar(&o.kills, "kills", 12, "processes to kill")
	flag.IntVar(&o.brokerKills, "broker-kills", 2, "times to kill the broker, if the driver has started it")
	flag.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()%1_000_000), "chooses who is killed and when")
	flag.DurationVar(&o.timeout, "timeout", 3*time.Minute, "give up after this time")
	flag.BoolVar(&o.verbose, "v", false, "print the roles' logs to stderr")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, *role, o); err != nil {
		fmt.Fprintf(os.Stderr, "outbox: %s: %v\n", *role, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, role string, o options) error {
	roles := map[string]func(context.Context, settings, watermill.LoggerAdapter) error{
		"orders": runOrders, "forwarder": runForwarder, "invoices": runInvoices,
	}
	start, ok := roles[role]
	switch {
	case role == "driver" && flag.NArg() == 0 && o.orders > 0 && o.copies > 0 && o.kills >= 0 && o.brokerKills >= 0:
		return drive(ctx, o)
	case !ok:
		return errors.New("invalid arguments, see -help")
	}

	if os.Getenv("END_WITH_STDIN") != "" { // the driver has it open, and may be killed
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
	}
	level := map[string]slog.Level{"1": slog.LevelDebug, "2": watermill.LevelTrace}[os.Getenv("DEBUG")] // else info
	logger := watermill.NewSlogLogger(slog.New(slog.NewJSONHandler(os.Stdout, &slog.HandlerOptions{Level: level})))
	return start(ctx, settings{
		postgresURL: cmp.Or(os.Getenv("POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"),
		amqpURI:     cmp.Or(os.Getenv("AMQP_URI"), "amqp://guest:guest@127.0.0.1:5672/"),
		prefix:      os.Getenv("TOPIC_PREFIX"),
	}, logger)
}

// runRouter runs a role's router until the context ends. Close stops the subscriptions before their contexts,
// see the documentation of package inboxamqp.
func runRouter(ctx context.Context, router *message.Router, logger watermill.LoggerAdapter) error {
	go func() {
		<-router.Running()
		logger.Info("Running", nil) // the driver waits for it
	}()
	context.AfterFunc(ctx, func() {
		if err := router.Close(); err != nil {
			logger.Error("Handlers were still running", err, nil)
		}
	})
	if err := router.Run(context.WithoutCancel(ctx)); err != nil || ctx.Err() != nil {
		return err
	}
	return errors.New("the router stopped by itself")
}

// reconnect is quicker than the default, which waits up to a minute for a broker that is long back.
var reconnect = &amqp.ReconnectConfig{
	BackoffInitialInterval: 100 * time.Millisecond, BackoffMultiplier: 1.5, BackoffRandomizationFactor: 0.5,
	BackoffMaxInterval: time.Second,
}
