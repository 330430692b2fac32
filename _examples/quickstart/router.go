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
	// GoChannel delivers a message again as soon as it is nacked: Retry is what slows that down.
	retry := middleware.Retry{MaxRetries: 3, InitialInterval: 10 * time.Millisecond, Multiplier: 2, MaxInterval: time.Second}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, nil)
	if err != nil {
		return nil, err
	}

	router.AddConsumerHandler("store_poisoned", poisonTopic, poisonQueue, ledger.StorePoisoned) // it moves messages: no inbox
	if !withInbox {
		return router, addNaively(router, pubSub, poisonQueue, ledger, deliveries, retry)
	}
	book := router.AddConsumerHandler("book_payment", topic, pubSub, ledger.Book)
	book.AddMiddleware(deliveries.Middleware) // counts for this story
	return router, once.AddTo(router, inbox.RouterOptions{
		PoisonPublisher: poisonQueue, PoisonTopic: poisonTopic, Retry: retry, Timeout: 30 * time.Second,
	}, book)
}

// addNaively adds the handler without an inbox, and all else as it is.
func addNaively(router *message.Router, pubSub, poisonQueue *gochannel.GoChannel, ledger *ledger, deliveries *deliveries, retry middleware.Retry) error {
	poison, err := middleware.PoisonQueueWithFilter(poisonQueue, poisonTopic, inbox.ShouldPoison)
	if err != nil {
		return err
	}
	retry.ShouldRetry, retry.ResetContextOnRetry = inbox.ShouldRetry, true
	book := router.AddConsumerHandler("book_payment", topic, pubSub, ledger.BookNaively)
	book.AddMiddleware(deliveries.Middleware, poison, retry.Middleware, middleware.Recoverer)
	return nil
}
