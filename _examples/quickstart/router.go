package main

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

const (
	topic       = "payments"
	poisonTopic = "payments_poison"
)

// newRouter is what one copies: the inbox, and the middleware around it in the order that matters.
func newRouter(
	ctx context.Context, pubSub *gochannel.GoChannel, ledger *ledger, deliveries *deliveries, withInbox bool,
) (*message.Router, error) {
	repository, err := inboxsql.NewRepository(ledger.db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultSQLiteSchema{}})
	if err != nil {
		return nil, err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return nil, err
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{})
	if err != nil {
		return nil, err
	}
	// Its Publish returns when the message is in the table.
	poisonQueue := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, nil)
	poison, err := middleware.PoisonQueueWithFilter(poisonQueue, poisonTopic, inbox.ShouldPoison)
	if err != nil {
		return nil, err
	}
	// GoChannel delivers a message again as soon as it is nacked: Retry is what slows that down.
	retry := middleware.Retry{
		MaxRetries: 3, InitialInterval: 10 * time.Millisecond, Multiplier: 2, MaxInterval: time.Second,
		ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true,
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, nil)
	if err != nil {
		return nil, err
	}

	handler := ledger.Book
	if !withInbox {
		handler = ledger.BookNaively
	}
	book := router.AddConsumerHandler("book_payment", topic, pubSub, handler)
	book.AddMiddleware(
		deliveries.Middleware,              // counts for this story
		poison,                             // stores what no retry mends; outages never get there
		retry.Middleware,                   // outside of the inbox: each attempt gets a fresh transaction
		middleware.Timeout(30*time.Second), // of one attempt, the wait for the claim included
		middleware.Recoverer,               // inside Retry: a panic is retried, then poisoned
	)
	if withInbox {
		book.AddMiddleware(once.Middleware) // innermost: the claim and the handler's writes commit together
	}
	router.AddConsumerHandler("store_poisoned", poisonTopic, poisonQueue, ledger.StorePoisoned)
	return router, nil
}
