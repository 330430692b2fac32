module github.com/devmappa/watermill-inbox

go 1.23.0

require (
	github.com/ThreeDotsLabs/watermill v1.5.1
	github.com/ThreeDotsLabs/watermill-amqp/v2 v2.1.3
	github.com/ThreeDotsLabs/watermill-sql/v3 v3.1.0
	github.com/lib/pq v1.12.3
	github.com/rabbitmq/amqp091-go v1.10.0
	go.uber.org/goleak v1.3.0
)
