// Command amqp_example books payments from a RabbitMQ queue into a PostgreSQL ledger, each payment once
// however often it is delivered. It ends with SIGTERM; what was in flight is then delivered again.
//
// Environment: POSTGRES_URL, AMQP_URI, QUEUE, CONCURRENCY, and DEBUG=1 for lines per message (2 for all of Watermill's).
package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func main() {
	naive := flag.Bool("naive", false, "work without the inbox, to see payments booked twice")
	flag.Parse()
	level := map[string]slog.Level{"1": slog.LevelDebug, "2": watermill.LevelTrace}[os.Getenv("DEBUG")] // else info
	logger := watermill.NewSlogLogger(slog.New(slog.NewJSONHandler(os.Stdout, &slog.HandlerOptions{Level: level})))
	if err := run(*naive, logger); err != nil {
		logger.Error("Stopped", err, nil)
		os.Exit(1)
	}
}

func env(name, fallback string) string { return cmp.Or(os.Getenv(name), fallback) }

func run(naive bool, logger watermill.LoggerAdapter) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	inFlight, err := strconv.Atoi(env("CONCURRENCY", "4"))
	if err != nil {
		return fmt.Errorf("CONCURRENCY: %w", err)
	}
	db, err := sql.Open("postgres", env("POSTGRES_URL", "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"))
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(inFlight + 1) // one per message in flight and one for the cleaner
	db.SetMaxIdleConns(inFlight + 1) // equal: the default of 2 closes and opens connections all the time
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, ledgerSchema); err != nil {
		return err
	}
	// The retention is longer than the longest way on which a message can come back.
	cleaner, err := inbox.NewCleaner(repository, inbox.CleanerOptions{
		Consumers: inbox.NamedConsumers("book_payment"),
		Retention: inbox.Retention{Default: 30 * 24 * time.Hour}, Logger: logger,
	})
	if err != nil {
		return err
	}
	go cleaner.Run(ctx)

	config := amqp.NewDurableQueueConfig(env("AMQP_URI", "amqp://guest:guest@127.0.0.1:5672/"))
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true // without it, Publish returns before the broker has stored anything
	queues, err := amqp.NewSubscriber(config, logger)
	if err != nil {
		return err
	}
	defer queues.Close()
	subscriber, err := inboxamqp.Concurrent(queues, inFlight) // one handler, several messages at a time
	if err != nil {
		return err
	}
	publisher, err := amqp.NewPublisher(config, logger)
	if err != nil {
		return err
	}
	defer publisher.Close()
	queue := env("QUEUE", "payments")
	poisonQueue := queue + "_poison"
	// The publisher declares no queue, and RabbitMQ confirms a message that has no queue, and drops it.
	if err := queues.SubscribeInitialize(poisonQueue); err != nil {
		return err
	}

	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
	if err != nil {
		return err
	}
	defer func() { // marks what was published; for handlers that return messages
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = once.Close(ctx)
	}()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 20 * time.Second}, logger)
	if err != nil {
		return err
	}
	handler := handler{db: db, logger: logger}
	retry := middleware.Retry{MaxRetries: 5, InitialInterval: 100 * time.Millisecond, Multiplier: 3, RandomizationFactor: 0.5, MaxInterval: 10 * time.Second}
	if naive {
		poison, err := middleware.PoisonQueueWithFilter(publisher, poisonQueue, inbox.ShouldPoison)
		if err != nil {
			return err
		}
		retry.ShouldRetry = inbox.ShouldRetry
		router.AddMiddleware(poison, retry.Middleware, middleware.Recoverer)
		router.AddConsumerHandler("book_payment", queue, subscriber, handler.BookNaively)
	} else {
		// The inbox, and around it the poison queue, retries and the timeout of one attempt, in the order that matters.
		if err := once.AddTo(router, inbox.RouterOptions{
			PoisonPublisher: publisher, PoisonTopic: poisonQueue, Retry: retry, Timeout: time.Minute,
		}); err != nil {
			return err
		}
		router.AddConsumerHandler("book_payment", queue, subscriber, handler.Book)
	}
	// Close stops the subscriptions before their contexts. A context that ends first makes watermill-amqp
	// take and return messages for a while, each a failed delivery, and CloseTimeout would not count.
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
